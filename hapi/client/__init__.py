"""The trainer's tier: transport, window, session, trainer. Never imports the server."""
