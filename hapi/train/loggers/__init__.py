"""Loggers: a training's figures in CSV files, TensorBoard, Weights & Biases, MLflow."""
