"""The member's identity: its folder, enrolment, certificates, connection, proxy, and `edge_client doctor`."""
