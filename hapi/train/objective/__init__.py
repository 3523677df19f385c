"""The objective of a training: losses, targets, and metrics of the validation samples."""
