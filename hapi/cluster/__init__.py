"""Many servers: deployed, scaled and simulated. Needs optional extras."""
