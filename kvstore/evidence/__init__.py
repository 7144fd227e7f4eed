"""Evidence: whether the store helped, from what daemons recorded, by criteria fixed beforehand.

`criteria` (what would convince, and its digest), `records` (reading the trace files), `masking`
(settings without tenants' names), `compare` (two sides and their intervals), `verdict`, `report`
(the whole as values), `markdown`, `check` (what changed since). Reads files and nothing else; the
caller gives the time. Called by the operator's tool.
"""
