"""What a member downloads by digest and keeps: the blob cache, and backbones from their four sources."""
