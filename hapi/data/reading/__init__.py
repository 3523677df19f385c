"""Reading samples by chunks or one by one."""
