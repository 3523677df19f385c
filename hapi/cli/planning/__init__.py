"""``hapi plan``: what it prints, its flags, what is kept, what is offloaded."""
