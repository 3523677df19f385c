"""Requests to servers, and the servers that a job uses."""
