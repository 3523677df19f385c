"""Programs that measure Hapi beside others, and print the comparison and its conditions."""
