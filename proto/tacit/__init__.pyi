from tacit_api.loading import load as load
from tacit_api.simulating import simulate as simulate

__version__: str
