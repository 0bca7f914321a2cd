"""From a member to the coordinator: the model that a member trained last, the text that it makes up of it, its owner's
consent, and the file's way out.

    models      the model of the newest round that the ledger was charged for, under HOME/synthesis/JOB
    folder      the corpus under HOME/corpora/JOB: file, statement, how far it came, what its owner decided
    making      a noised histogram of labels, texts from the prior, the file and its statement
    sending     the protocol of the upload, over as many connections as it takes
    releaser       all of it in order, for a running client

Order: charge, then keep the model; charge the histogram, then draw it; make and write; ask the owner; write the
receipt; send. Each step begins with what the disk says of the ones before, so that a process may be killed at any
instruction: a kill between two steps costs the first one's work and never its charge.
"""
