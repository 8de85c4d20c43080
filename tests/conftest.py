"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# On a busy machine a first draw can wait seconds for an import or a core; speed is measured in benchmarks/.
settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("agentrl")
