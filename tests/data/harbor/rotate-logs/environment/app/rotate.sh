#!/bin/sh
file=$1
keep=$2
i=1
while [ $i -lt $keep ]; do
    [ -f $file.$i ] && mv $file.$i $file.$((i + 1))
    i=$((i + 1))
done
mv $file $file.1
: > $file
