"""What all tests share: properties are judged by what they find, not by how fast a busy host is."""

from hypothesis import HealthCheck, settings

settings.register_profile("weightbus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weightbus")
