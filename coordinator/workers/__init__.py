"""Worker processes that end members' connections on port 7441: TLS, gRPC and message limits, and no decision.

`coordinator serve --workers N` starts them. The main process checks every caller, decides everything, and alone has the
database. `process` is a worker: it hands each call to the main process and writes what it is told. `front` is the main
process's side, a `grpc.aio.Server` over all workers, so the services do not know who ends a connection. `supervisor`
starts workers, restarts one that dies, and ends them. `channel` moves frames between two processes over a socket pair
that has no name.
"""
