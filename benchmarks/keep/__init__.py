"""Choice of what is kept, forecasts of filling, and the model of one machine: each beside the truth."""
