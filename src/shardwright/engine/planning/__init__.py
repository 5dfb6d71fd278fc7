"""What a training job will need, found out by one process before it runs.

`model` looks at a model as one rank would hold it, `optimizer` at an optimizer, `memory` adds up a rank's bytes, `layout`
does so for every stage of one configuration, and `fit` tries many.
"""
