"""Saving and loading training state.

`save.save_checkpoint` and `load.resume_from_checkpoint` are the two calls; `state` says what they need from a
model and an optimizer. What lies on disk: `layout` (names), `manifest` (content), `integrity` (is it whole),
`safe_loading` (what files may hold), `folder` and `retention` (several side by side), `storage` (bytes).
"""
