"""Eight simulated CPU devices for every test; the environment is read when JAX is first imported,
so it is set here."""

import os

_DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
