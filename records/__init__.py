"""From a file of our own records to examples of token ids. Foreign records: convert/, before a run.

A record passes through these files in this order:

examples.py   load_examples takes the records of a file through the others: read it first;
              then splits, the table before training, the hash of the data
sources.py    which files a setting names, and their records as they stand there
forms.py      one record of any known form becomes a Record: prompt, completions, label; and the fields
              of a prompt and its answer, which generate.py, the page for thumbs and iterations write
tokenizer.py  a Record becomes text, and then token ids
template.py   what tokenizer.py asks for the text of messages: the model's chat template, and the check
              that it leaves nothing out
splits.py     the setting data.split
"""
