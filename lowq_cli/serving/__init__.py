"""Answering many requests on one model: an engine that computes tokens, and HTTP in front of it.

The way of a request: `http/app.py` parses it -> `http/dispatcher.Hub` -> `engine_process.ApartEngine`, a pipe -> in the
engine's process `engine_server.EngineServer` -> `continuous.ContinuousEngine`, one thread: `scheduler.Scheduler.plan` chooses
the rows of a pass, `model_runner.ModelRunner` computes it and samples in it (`sampler.Special` after it, for requests that
need more than a temperature) -> `request.Event`s -> the pipe -> `Hub` -> `http/text.Writer`, which makes text of the tokens,
in which `output/read.Reader` finds thoughts and calls -> `http/reply.py`, in the form of one of `dialects/`.
With drafts, a sequence's `guessing.TextDrafter` guesses (by n-grams or a `device_drafts.DeviceDrafts`),
`draft_rounds.DraftRounds` decides how many guesses a pass takes, and `draft_passes.DraftPasses` computes it and checks them.
The tokens that a grammar allows come from another process (`mask_process.MaskProcess`).
"""
