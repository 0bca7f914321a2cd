"""The corpus release: a member generates synthetic text from its last model and, if its owner agrees, sends it.

    models      the model of the newest round that the ledger was charged for, under HOME/synthesis/JOB
    folder      the corpus under HOME/corpora/JOB: file, statement, stage, and the owner's decision
    making      a noised histogram of labels, texts from the prior, the file and its statement
    sending     the protocol of the upload, over as many connections as it takes
    releaser    all steps in order, for a running client

Order: charge, then keep the model; charge the histogram, then draw it; generate and write; ask the owner; write the
receipt; send. Each step starts from what the earlier ones left on the disk, so a process may be killed at any
instruction. A kill between two steps may lose the first one's work, but never its charge.
"""
