"""Downloads that a member keeps by digest: the blob cache, and backbones from their four sources."""
