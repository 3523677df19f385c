"""Object stores at a URL: folders, memory, S3, GCS, Azure."""
