"""The browser that tests of pages run in."""

import shutil

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of Chromium; None if it is not installed (`make tools` installs it)."""
