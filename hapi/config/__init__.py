"""Settings from flags, YAML files and the environment."""
