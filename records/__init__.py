"""From a file to examples of token ids. A record passes through these files in this order:

examples.py   load_examples takes the records of a file through the others: read it first;
              then splits, the table before training, the hash of the data
sources.py    which files a setting names, and their records as they stand there
foreign.py    a record of another form becomes none, one or several of ours, as the settings say; by
  layout.py        what the settings say: where its fields lie, and what their values mean
  paths.py         one path of data.columns, and the words of data.labels
  conversation.py  a conversation whose messages carry ratings, or with a pointer to the rated one
  answers.py       one answer, two with a verdict, lists of answers; pairs
  dialogues.py     messages, and texts that hold a dialogue
forms.py      one record of any known form becomes a Record: prompt, completions, label
tokenizer.py  a Record becomes text, and then token ids
template.py   what tokenizer.py asks for the text of messages: the model's chat template, and the check
              that it leaves nothing out
page.py       `python data.py FILE`: a file as a run would see it
show.py       what page.py prints: records as turns, and settings that may read a file
ratings.py    a file of thumbs that rate.py writes
"""
