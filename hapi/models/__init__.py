"""Models as ordered lists of layers: cut points, slices, the zoo and the repository of pushed weights."""
