"""A foreground rank and at most one background job on the same GPU (DeepPool, section 5).

The foreground's process is the *host*: it runs the background job, its *guest*, in a thread of its own, on a
stream of low priority. The guest's own process is a thin *proxy*, so that for everybody else it is a job like
any other. `docs/lanes.md` tells the whole story.
"""
