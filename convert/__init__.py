"""Foreign data to our own records: python -m convert FILE (docs/convert.md).

Read in this order: layout.py (the settings), paths.py (the path of a field), values.py (the meaning of a value),
messages.py (messages in our form), answers.py (one answer, two, lists), conversation.py (ratings in a conversation),
reader.py (from records to records), program.py (the command), forms/ (settings for tools and data sets).
"""
