"""Foreign data to our own records: python -m convert FILE (docs/convert.md).

Read in this order: layout.py (the settings), paths.py (where a field lies), values.py (what a value means),
messages.py (messages in our form), answers.py (one answer, two, lists), conversation.py (ratings in a conversation),
reader.py (from records to records), program.py (the command), forms/ (settings for tools and data sets).
"""
