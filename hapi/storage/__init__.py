"""Objects in any store, data sets of shards with an index, their transform and the order of reading them."""
