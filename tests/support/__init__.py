"""Code that tests of several packages share."""
