"""The storage tier: admission, frozen forward, frames. Never imports the client."""
