"""Who this machine is: its folder, enrolment, certificates, connection, proxy, and `edge_client doctor`."""
