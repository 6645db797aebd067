"""The HTTP server that agents take for their model vendor: sessions, limits, streaming; one file per wire."""

from sandlot.gateway.call import Policy, Recorder
from sandlot.gateway.gateway import Finished, Gateway, Opened
from sandlot.gateway.limits import GatewayLimits, SessionLimits
from sandlot.gateway.session import Session

__all__ = ["Finished", "Gateway", "GatewayLimits", "Opened", "Policy", "Recorder", "Session", "SessionLimits"]
