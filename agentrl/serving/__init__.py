"""HTTP that our servers share: limits, origin checks, errors."""
