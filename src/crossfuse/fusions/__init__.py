"""The fusions, one folder or file each. They know no model family."""
