"""Commands about models: pushed ones, and files of trained ones."""
