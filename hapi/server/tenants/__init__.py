"""Tenants of a server: who asks, by which token, and what each may see."""
