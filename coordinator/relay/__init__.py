"""The process that stands before enrolment: it bounds what strangers cost, and holds no key and no database.

`supervisor` binds port 7440, starts the relay as a child process and starts it again when it dies. `process` is that
child: it accepts, asks `admission` whether a connection may stay and when it is passed on, and copies bytes between the
stranger and the enrolment server, which listens on a Unix socket only. TLS runs through it unopened. `names` carries
the stranger's address to the enrolment server, which counts tries by it.
"""
