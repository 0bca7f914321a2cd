"""Synthetic text from a member's model: a recurrent variational autoencoder, two ways to train it, and its corpora.

    setting     sizes, and the numbers of the published variant; what each variant promises, in one sentence
    words       texts to ids over a public list of words, and back
    model       the autoencoder, in which each text's loss is its own
    training    variant `sound`: `learning.training.private` without changes; the theorem that sampling relies on
    labels      how many texts of each label: a histogram with discrete Gaussian noise, and its event
    sampling    texts from the prior and a label
    writing     a corpus as a file of lines, cut to a size
    published   variant `published`: the paper's steps, without any guarantee
    quality     how much a corpus resembles the texts it was learnt from: signs, none of them a guarantee

Nothing here knows the ledger or the network: a caller charges the events before it releases anything.
"""

from learning.synthesis.setting import NO_GUARANTEE, PublishedSetting, RvaeSetting, Variant, promise_of

__all__ = ["NO_GUARANTEE", "PublishedSetting", "RvaeSetting", "Variant", "promise_of"]
