"""Here so that pytest puts this folder on the path: tests in subfolders share its helpers."""
