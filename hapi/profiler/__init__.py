"""Measurements, and the planners that decide from them. Planners are pure: no torch, no aiohttp."""
