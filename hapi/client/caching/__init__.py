"""Features that this machine keeps: what they are named by, where they come from, and how they are filled."""
