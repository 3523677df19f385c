"""Several processes that train one model: their exchange, and their one plan."""
