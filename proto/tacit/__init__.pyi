from tacit_api.joining import Member as Member
from tacit_api.loading import load as load
from tacit_api.local import local_federation as local_federation
from tacit_api.operating import AsyncCoordinator as AsyncCoordinator
from tacit_api.operating import Coordinator as Coordinator
from tacit_api.simulating import simulate as simulate

__version__: str
