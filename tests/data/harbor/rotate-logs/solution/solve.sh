#!/bin/bash
cat > /app/rotate.sh <<'END'
#!/bin/sh
file=$1
i=$2
while [ "$i" -gt 1 ]; do
    before=$((i - 1))
    [ ! -f "$file.$before" ] || mv "$file.$before" "$file.$i"
    i=$before
done
mv "$file" "$file.1"
: > "$file"
END
