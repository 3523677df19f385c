"""Datasets: manifest, index, sample directory, epoch order."""
