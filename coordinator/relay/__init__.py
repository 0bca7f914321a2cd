"""The relay before the enrolment port: a process that bounds what strangers cost, and holds no key and no database.

`supervisor` binds port 7440, starts the relay as a child process, and restarts it when it dies. `process` is the child:
it accepts connections, asks `admission` whether each may stay and when it is forwarded, and copies bytes between the
stranger and the enrolment server, which listens only on a Unix socket. The relay never decrypts the TLS that it
forwards. `names` passes the stranger's address to the enrolment server, which counts tries by it.
"""
