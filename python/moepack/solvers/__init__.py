"""Algorithms that turn weights into codes. They open no files and know no methods."""
