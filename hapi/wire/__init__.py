"""The contract of the two tiers: references, messages, frames. Imports neither torch nor aiohttp."""
