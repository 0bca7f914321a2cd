"""The running member: `edge_client run`, its dry run, its progress and metrics, and `edge_client export`."""
