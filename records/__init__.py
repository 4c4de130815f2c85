"""From a file to examples of token ids. A record passes through these files in this order:

readers.py    files of records (json lines, csv, parquet, the Hub): one raw record after the other
forms.py      one raw record of any known form becomes a Record: prompt, completions, rating
tokenizer.py  a Record becomes text, by the model's chat template, and then token ids
examples.py   load_examples, which calls all of them: read it first; splits, table, hash of the data
preview.py    prints a file as a run would see it
"""
