"""Who is next: admission and fair shares."""
